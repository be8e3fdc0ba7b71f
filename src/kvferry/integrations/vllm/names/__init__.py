"""The names of vLLM that kvferry uses, what each known release has of them, and the comparison of both."""
