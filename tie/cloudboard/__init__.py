"""The contract with CloudBoard, and reference parts that stand in for the fleet: ingress, registry, jobhelper, kps."""
