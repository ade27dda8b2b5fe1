"""tie-cloud-app: one request from its start to its end, then gone."""
