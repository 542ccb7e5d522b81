// Package failover owns the test of what clients see when metadata servers die,
// stand still, are cut off from etcd, are stopped and started: real servers as
// processes of their own, a real etcd, clients that keep creating and reading,
// and checkers of what they were told.
package failover
