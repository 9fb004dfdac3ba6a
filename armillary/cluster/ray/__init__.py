"""Jobs and data preparation on a Ray cluster: ranks as actors in a placement group, parts of a corpus as tasks."""
