"""The contract with CloudBoard, and reference parts so that a node runs without the fleet."""
