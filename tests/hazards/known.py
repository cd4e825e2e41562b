"""Hazards that do not end yet as they should."""

OPEN = frozenset(
    {
        "flow-by_keys_of_a_dict_in_another_order",
        "host-one_hot_of_a_given_width",
        "host-picks_a_row_by_a_scalar_tensor",
    }
)
