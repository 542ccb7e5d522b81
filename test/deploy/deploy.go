// Package deploy owns the tests of the folder deploy: the chart, the plain manifests made from
// the chart, the dashboard and the alerts.
package deploy

//go:generate go test . -run TestPlainManifests -update
