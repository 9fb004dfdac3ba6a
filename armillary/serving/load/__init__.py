"""Load tests of any OpenAI-compatible server: what is sent when, what came back, and what it means."""
