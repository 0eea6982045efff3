"""What a process does not import; a start is mostly imports."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "imports",
    [
        "from roll.platforms import get_platform; get_platform('cpu').prepare_megatron(); "
        "import roll.distributed.train.megatron_strategy",
        "import sglang.srt.managers.scheduler",
    ],
    ids=["training rank", "scheduler of an engine"],
)
def test_a_cpu_process_does_not_import_the_compiler_of_torch(imports: str) -> None:
    program = f"import sys; {imports}; print('torch._inductor.compile_fx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["False"]), done.stderr
