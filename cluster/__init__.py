"""Settings of the cluster and of distributed training."""
