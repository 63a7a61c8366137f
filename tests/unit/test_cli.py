import subprocess
import sys
from pathlib import Path

import pytest

from vllm_jetspecpp import __version__, cli
from vllm_jetspecpp.commands import training


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"jetspecpp {__version__}\n"


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in ("prepare-demo", "demo", "doctor", "regenerate", "plan"))]
)
def test_every_command_has_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: jetspecpp" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["eval"],
        ["bench"],
        ["bench", "serve", "--num-outcomes", "many"],
        ["bench", "serve", "--cores", "1,1"],
        ["bench", "serve", "--method-config", "dflash=3"],
        ["train", "draft", "t"],
        ["regenerate", "t", "p", "o", "--limit", "1", "--shard", "2/2"],
        ["plan", "--batch", "1,x"],
        ["acceptance", "--settings", "1"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == cli.USER_ERROR
    assert "usage: jetspecpp" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "expected"), [("0/1", (0, 1)), ("1/4", (1, 4))])
def test_shard(text: str, expected: tuple[int, int]) -> None:
    assert training.shard(text) == expected


def test_a_missing_folder_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--target", str(tmp_path / "missing")]) == cli.USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("jetspecpp: no target in ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "128"], "--batch sizes must be from 1 to 64, got 128"),
        (["--prompts", "0"], "--prompts must be at least 1, got 0"),
        (["--validate", "-1"], "--validate must be at least 0, got -1"),
    ],
)
def test_plan_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == cli.USER_ERROR
    assert message in capsys.readouterr().err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from vllm_jetspecpp import cli; cli.build_parser().format_help(); "
        "print([m for m in ('torch', 'vllm', 'ray', 'transformers', 'openai') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "[]\n"
