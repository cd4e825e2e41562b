"""Hazards that do not end yet as they should."""

OPEN = frozenset(
    {
        "aliasing-as_strided_before_its_input",
        "aliasing-resizes_an_output_argument",
        "aliasing-writes_into_a_transposed_input",
        "flow-by_keys_of_a_dict_in_another_order",
        "host-one_hot_of_a_given_width",
        "host-picks_a_row_by_a_scalar_tensor",
    }
)
