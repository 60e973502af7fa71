"""Alerts: what people should hear of, sent to the addresses that an operator has configured.

    events stream ──alert.py──► one alert per incident, job state or breaker ──sender.py──► each address: queue, rate, retries
                                                                                              │
                                                        targets.py: webhook (CloudEvents), Apprise (Slack, e-mail …), plug-ins

The supervisors of a fleet share the stream as one consumer group, so each alert is sent by one of them. Nothing waits for an
alert, and none changes what is decided.
"""
