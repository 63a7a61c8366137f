"""Generate with JetSpec++ in this process: `.venv/bin/python examples/offline.py`, after `make demo` or `make test`."""

from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(
        ".cache/smollm2-135m-instruct",
        max_model_len=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=2 << 30,  # by default vLLM wants most of the machine's memory
        speculative_config={
            "method": "jetspecpp",
            "model": "checkpoints/smollm2-135m-instruct",
            "num_speculative_tokens": 7,
        },
    )
    messages = [{"role": "user", "content": "Explain in three sentences why the sky is blue."}]
    answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=128))[0].outputs[0]
    print(answer.text)
    counters = llm.collective_rpc("jetspecpp_stats")[0]
    print(f"tokens per verification: {counters['acceptance_length']:.2f}, hit rate: {counters['hit_rate']:.0%}")


# vLLM starts its engine in a child process, which imports this file again.
if __name__ == "__main__":
    main()
