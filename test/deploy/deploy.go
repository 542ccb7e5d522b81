// Package deploy owns the tests of what the folder deploy ships: the chart, the
// plain manifests that are made from it, the dashboard and the alerts.
package deploy

//go:generate go test . -run TestPlainManifests -update
