"""Hazards that do not end yet as they should."""

OPEN = frozenset(
    {
        "flow-by_keys_of_a_dict_in_another_order",
    }
)
