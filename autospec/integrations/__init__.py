"""autospec inside other engines. Importing this loads none of them."""
