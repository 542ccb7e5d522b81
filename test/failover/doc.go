// Package failover owns the test of what clients see when metadata servers die,
// stand still, are cut off from etcd, are stopped and started: real servers as
// processes of their own, a real etcd, clients that keep creating and reading,
// and checkers of what they were told; and of what writers see when chunk servers
// go and are replaced as well.
package failover
