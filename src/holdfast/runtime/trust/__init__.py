"""Who is who: certificates, identities, tokens, and who may call what."""
