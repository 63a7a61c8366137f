"""The step recorder, which times both processes from outside, and what is made of its recordings."""
