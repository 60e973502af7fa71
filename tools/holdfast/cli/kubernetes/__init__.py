"""`holdfast kubernetes`: jobs as JobSets of a Kubernetes cluster."""
