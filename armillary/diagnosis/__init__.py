"""Diagnosis: which loop holds a run back, what in it, and what each lever would buy."""
