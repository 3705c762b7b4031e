"""Files at URLs: requests, retries, local copies, and fetching before they are needed."""
