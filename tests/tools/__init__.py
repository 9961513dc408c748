"""Tools that look at the tests themselves."""
