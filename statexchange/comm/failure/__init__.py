"""How ranks notice that another one has failed, and agree on what became of the call in which it did."""
