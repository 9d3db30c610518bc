"""The exact decoder: draft, verify, commit, roll back. Choices cost time, never correctness."""
