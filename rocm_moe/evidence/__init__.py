"""What compiled AMD code consists of, the bounds modelled from it, and the measurements that check the rates."""
