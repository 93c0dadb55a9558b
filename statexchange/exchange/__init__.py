"""Export, load, save and gather live state: the only package that imports both `comm` and `storage`."""
