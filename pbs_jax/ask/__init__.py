"""Asking a checkpoint about one picture: what is found, what is answered, what the model looked at; `pbs ask`."""
