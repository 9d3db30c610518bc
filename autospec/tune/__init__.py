"""`autospec tune`: the policy that would have been fastest on recorded traffic, found by walking along its answers."""
