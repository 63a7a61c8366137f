"""The networks of the draft process: draft model, adapter, and the decoder cut from the target."""
