"""The demonstration on a laptop: a real small model, real prompts, two CPU cores."""
