"""Hazards that do not end yet as they should."""

OPEN = frozenset(
    {
        "aliasing-adds_a_key_to_its_argument",
        "aliasing-appends_to_a_list_of_inputs",
        "aliasing-as_strided_before_its_input",
        "aliasing-asks_for_an_offset",
        "aliasing-ravels_the_bytes",
        "aliasing-resizes_an_output_argument",
        "aliasing-takes_a_key_from_its_argument",
        "aliasing-writes_into_a_transposed_input",
        "flow-by_keys_of_a_dict_in_another_order",
        "host-one_hot_of_a_given_width",
        "host-picks_a_row_by_a_scalar_tensor",
    }
)
