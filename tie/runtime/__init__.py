"""AFM Runtime: the engine that turns requests into tokens, as a Python backend of Triton.

    triton_model ─ submits to ─▶ engine ─ asks ─▶ scheduler ─ draws on ─▶ blocks
                                   │  one step: plan → forward → sample → stops, grammar → events
                                   └─ tie.bones executes the batch on the owner's weights (owner_client)

`launch` starts the container's processes, `container` keeps them together; `kv_server` and `control_server` are the
runtime's two other sockets.
"""
