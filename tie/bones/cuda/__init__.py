"""The executor for an NVIDIA GPU: PyTorch, flashinfer's paged attention, and captured graphs for decoding.

Read in this order: `numbers` (what a step is told), `pool` (where keys and values lie), `attention` (the border behind
which `reference` and `flashinfer` stand), `decode` (the step that is captured), `executor` (which puts them together).
All but the capture itself runs on any device, and is tested on a CPU.
"""
