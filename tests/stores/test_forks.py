"""A fork marks the child's copy of every open store, once; the parent's stores are not marked."""

import gc
import os
from weakref import ref

from holdfast.stores import base


class Store:
    forks = 0

    def mark_forked(self):
        self.forks += 1


def is_true_in_child(condition):
    child = os.fork()
    if not child:
        try:
            os._exit(0 if condition() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_a_registered_store_is_marked_as_forked_in_the_child_only():
    store, other = Store(), Store()
    base.register_store(store)
    assert is_true_in_child(lambda: (store.forks, other.forks) == (1, 0))
    assert store.forks == 0


def test_a_store_is_marked_again_in_a_grandchild():
    store = Store()
    base.register_store(store)
    assert is_true_in_child(lambda: is_true_in_child(lambda: store.forks == 2))


def test_a_registered_store_can_be_garbage_collected():
    store = Store()
    base.register_store(store)
    kept = ref(store)
    del store
    gc.collect()
    assert kept() is None
    assert is_true_in_child(lambda: True)
