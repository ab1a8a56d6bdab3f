"""Who other services are, and who this one is: certificates, a shared token, and tenants that are signed."""
