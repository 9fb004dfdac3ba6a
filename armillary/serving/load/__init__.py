"""Load tests of any OpenAI-compatible server: schedule, sender, summary and report."""
