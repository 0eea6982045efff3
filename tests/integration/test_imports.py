"""What a process does not import; a start is mostly imports."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
import sys

def has_compiler():
    return "torch._inductor.compile_fx" in sys.modules

from roll.platforms import get_platform
get_platform("cpu").prepare_megatron()
import roll.distributed.train.megatron_strategy
training_rank = has_compiler()
import sglang.srt.managers.scheduler
print(f"training rank {training_rank}, scheduler of an engine {has_compiler()}")
"""


def test_cpu_processes_do_not_import_the_compiler_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    printed = done.stdout.strip().splitlines()[-1:]
    assert (done.returncode, printed) == (0, ["training rank False, scheduler of an engine False"]), done.stderr
