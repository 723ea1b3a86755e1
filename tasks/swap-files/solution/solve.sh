#!/usr/bin/bash
mv {{pair.0}}.txt aside
mv {{pair.1}}.txt {{pair.0}}.txt
mv aside {{pair.1}}.txt
