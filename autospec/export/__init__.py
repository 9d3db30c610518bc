"""`autospec export`: what other runtimes can take from a tuned policy, with the limits said."""
