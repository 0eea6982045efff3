"""Which methods of a worker can be called remotely, and by which deadline."""

from __future__ import annotations

from roll.distributed.worker import Worker, register, registered_methods


class Base(Worker):
    @register(deadline="sync_timeout_s")
    def update(self) -> int:
        return 1

    def helper(self) -> int:
        return 2


class Derived(Base):
    def update(self) -> int:
        return 3

    @register()
    def extra(self) -> int:
        return 4


def test_registered_methods_and_their_overrides_are_remote() -> None:
    methods = registered_methods(Derived)
    assert methods["update"] == "sync_timeout_s" and methods["extra"] == "rpc_timeout_s"
    assert "helper" not in methods
    assert methods["initialize"] == "start_timeout_s"
