"""The rendezvous service: its protocol, its server, and a host's membership. Loaded with gRPC."""
