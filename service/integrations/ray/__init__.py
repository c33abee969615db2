"""The service as replicas of a Ray Serve application. Nothing else imports this room, and it alone
imports ray."""
