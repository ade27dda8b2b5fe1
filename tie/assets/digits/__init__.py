"""The digits demo: a small vision tower, trained in front of the frozen demo model, that sees handwritten digits."""
