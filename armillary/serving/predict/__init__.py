"""Any exported model behind HTTP: dynamic batching, schemas taken from the model, new versions with no lost request."""
