"""What every per-request process imports stays light."""

import subprocess
import sys


def test_no_numpy_for_those_who_only_encode():
    program = (
        "import sys; import tie.assets.tokenizer, tie.assets.chat, tie.assets.bundle, tie.assets.manifest;"
        "print([name for name in ('numpy', 'gguf', 'torch', 'safetensors', 'rich', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
