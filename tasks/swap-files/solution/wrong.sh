#!/usr/bin/bash
mv {{pair.0}}.txt {{pair.1}}.txt
mv {{pair.1}}.txt {{pair.0}}.txt
