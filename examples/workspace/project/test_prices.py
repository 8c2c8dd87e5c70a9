"""python3 -m unittest"""

import unittest

from prices import reduce


class TestReduce(unittest.TestCase):
    def test_a_discount_is_taken_off(self) -> None:
        assert reduce(80, 10) == 72
