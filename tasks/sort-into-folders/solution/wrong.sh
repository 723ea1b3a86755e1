#!/usr/bin/bash
mkdir {{pair.0}} {{pair.1}}
mv ./*.txt {{pair.1}}/
mv ./*.log {{pair.0}}/
