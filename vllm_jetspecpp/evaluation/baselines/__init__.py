"""The drafters that the paper compares with, as engines: one request at a time, drafts made after each verification."""
