"""Who forks: the child's copies of open stores are told so, each once, and nobody in the parent is."""

import gc
import os
from weakref import ref

from holdfast.stores import base


class Store:
    told = 0

    def mark_forked(self):
        self.told += 1


def in_a_child(fact):
    child = os.fork()
    if not child:
        try:
            os._exit(0 if fact() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_an_open_store_is_told_in_the_child_and_not_in_the_parent():
    store, other = Store(), Store()
    base.register_store(store)
    assert in_a_child(lambda: (store.told, other.told) == (1, 0))
    assert store.told == 0


def test_a_childs_child_is_told_as_well():
    store = Store()
    base.register_store(store)
    assert in_a_child(lambda: in_a_child(lambda: store.told == 2))


def test_to_watch_a_store_does_not_keep_it():
    store = Store()
    base.register_store(store)
    kept = ref(store)
    del store
    gc.collect()
    assert kept() is None
    assert in_a_child(lambda: True)
