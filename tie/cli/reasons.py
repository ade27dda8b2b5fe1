"""The node's stable codes in plain words, for somebody who was asleep. A code that is not here is shown as it is."""

from typing import Final

WORDS: Final = {
    "ready": "everything is as it should be",
    "operator": "an operator asked for it",
    "timer": "its runtime had served as long as it may",
    "error": "something had failed (see the lines before)",
    "owner": "the model owner is another one than the runtime got its weights from",
    "asset": "`tie assets activate` exchanges the model bundle",
    "maintenance": "maintenance is on",
    "fresh-runtime-deadline": "no fresh runtime came up in time",
    # the runtime and its container
    "runtime-gone": "the runtime's container has ended or does not answer",
    "runtime-in-error": "the runtime's probe says that it has failed",
    "runtime-initializing": "the runtime is still starting",
    "runtime-recycling": "the runtime is on its way out",
    "runtime-unknown": "the runtime's probe says what this version does not know",
    "runtime-stale": "the old runtime has not gone",
    "engine-gone": "the engine's process ended",
    "engine-starting": "the engine is starting",
    "start-timeout": "the engine did not start in time",
    "socket-gone": "a socket of the runtime has lost its file",
    "canary-pending": "no test request has been answered yet",
    "canary-timeout": "test requests got no answer, and the engine computed nothing meanwhile",
    "canary-late": "test requests got no answer for long, though the engine was at work",
    "canary-failed": "a test request got no answer",
    "canary-died": "the connection to the runtime broke during a test request",
    "canary-refused": "the runtime refused a test request: runtime.context_tokens may be too small for it",
    "canary-protocol": "the runtime answered a test request with what is no answer",
    "canary-no-token": "the runtime answered a test request with nothing",
    "no-cuda": "a part is configured for CUDA, and CUDA does not work here",
    "warming": "the system prompts are being computed",
    "not-warmed": "the system prompts have not been computed yet",
    # the other parts
    "owner-gone": "the model owner does not answer",
    "owner-loading": "the model owner is loading the weights",
    "owner-failed": "the model owner could not load the weights",
    "no-bundle": "there is no model bundle at model.bundle",
    "bundle-invalid": "the model bundle is damaged: `tie assets verify`",
    "no-gpu": "there is no GPU that can be used",
    "out-of-memory": "there is too little memory for it",
    "owner-unknown": "the model owner says what this version does not know",
    "owner-changed": "the model owner is another one than the runtime got its weights from",
    "gpuhealthd-gone": "gpuhealthd does not answer",
    "gpu-starting": "gpuhealthd has not looked at the hardware yet",
    "gpu-unavailable": "gpuhealthd calls the hardware unfit",
    "gpu-stale": "what gpuhealthd knows of the hardware is too old",
    "probe-starting": "gpuhealthd has not looked at the hardware yet",
    "probe-gone": "gpuhealthd's prober has ended, and is started again",
    "recovering": "it is well again, and has to stay so for a while",
    "probe-hung": "gpuhealthd's prober hangs in a call to the driver",
    "probe-garbled": "gpuhealthd's prober says what makes no sense",
    "cloudboard-gone": "CloudBoard does not answer",
    "keys-silent": "the key service (tie-kps) does not answer, so that no request can be opened",
    # the node
    "starting": "the controller has only just begun",
    "settling": "all parts are well, and have to stay so for a while first, for it was lost several times in a row",
    "away-too-long": "the node has been out of service for too long",
    "recycles-in-vain": "fresh runtimes and a fresh model owner did not help",
    "given-up": "the node gave up: mend what is wrong, then `tie recycle`",
    "disk-full": "the run directory's disk is full: make room there",
}


def why(code: str) -> str:
    """A code in plain words."""
    return WORDS.get(code, code.replace("-", " "))
