"""The exact decoder: draft, verify, commit, roll back. DESIGN: choices cost time, never correctness."""
