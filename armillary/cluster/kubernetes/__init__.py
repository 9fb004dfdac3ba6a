"""Jobs on Kubernetes: the objects of a job as manifests, the API server's view of it, and the target's functions."""
