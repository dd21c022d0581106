"""The walk of a request: through which files of Baton one request goes, from its HTTP connection to its last token."""
